DATA=[]
